"""Where parameters and activations live: sharding, recomputation, offloading."""
