"""What a run does before its first step: model, data, an earlier session, and a warm-up of kernels and memory."""
