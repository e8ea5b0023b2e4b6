"""What layers keep for their backward pass: recomputed, on the device, or in the host's memory."""
