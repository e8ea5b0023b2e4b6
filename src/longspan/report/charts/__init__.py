"""Line charts as SVG, in a page or as documents of their own."""
