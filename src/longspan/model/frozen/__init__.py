"""Weights that an adapter leaves as they are, in four or eight bits: packed as bytes, whole where a layer computes."""

# On its way from a file to a product a frozen weight is
#
#   quantization_config  -- read_quantization -->  PackedForm: which weights of a model are packed, and how
#   tensors of a folder  -- FORMATS -->            StoredWeight: codes and scales, read as packed rows or as numbers
#                                                    its PackedFormat: what the bytes of rows mean (NF4 also packs)
#                                                    with PackedRows: how many bytes a row has, which plans count too
#   a model's parameter  -- pack_parameter -->     PackedWeight: what stands at the module for its uint8 parameter
#   FSDP2's shards       -- a gather -->           the weight that a layer finds, by the hook HookedParam.unpacking
#
# FrozenFeature chooses the formats and replaces parameters, and DeferredWeights fills them part by part.
