"""Process groups, meshes, and the channels over them."""
