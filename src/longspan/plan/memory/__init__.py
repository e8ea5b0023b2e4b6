"""What a step needs of a GPU's memory and of the host's, before it runs: from a configuration, a home and a plan.

`MemoryPlan` counts bytes; `choose_memory` picks what layers keep. No torch.
"""
