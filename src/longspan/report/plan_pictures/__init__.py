"""Pictures of a plan: bars over time or rows, as SVG for pages, as a Chrome trace and as PNG."""
