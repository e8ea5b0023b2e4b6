"""Plans of coming steps, made in another process."""
