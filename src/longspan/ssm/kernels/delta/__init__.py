"""Delta rules: gated delta nets, and Kimi's delta attention."""
