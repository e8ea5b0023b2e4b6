"""Pictures of a plan: its bars, as SVG with a Chrome trace, and as PNG."""
