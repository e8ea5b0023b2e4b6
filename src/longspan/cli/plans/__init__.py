"""What `plan` and `plan --compare` plan for: lengths, homes and models from flags, and tables of plans."""
