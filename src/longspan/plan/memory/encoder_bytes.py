"""What images take: activations of a tower's blocks, its weights while they are whole, and the work of a block.

Encoders run before the language model. What they keep waits until its backward pass is over, or, where they are
recomputed, is made again then, a wave at a time. Sizes are those of `EncoderShape`: a tower's blocks, without what
projectors keep.
"""

from functools import cached_property

from longspan.plan.items.encoder_shape import EncoderShape
from longspan.plan.memory.step_peak import StepPeak

_BLOCK_ROWS = 8  # tensors as wide as the tower that a block keeps: two norms' inputs and outputs, q, k, v, output
_BACKWARD_ROWS = 3  # tensors of gradients as wide as the MLP in a block's backward pass
_ROTARY = 4  # bytes of a number of queries and keys while rotary angles are applied, in float32


class EncoderBytes:
    """Images of one slot: `rows` of the language model in a step, or in a wave where encoders are recomputed.

    >>> EncoderBytes(peak).bytes_kept  # doctest: +SKIP
    """

    def __init__(self, peak: StepPeak) -> None:
        """Take the rank whose images are counted."""
        self._peak, self._settings = peak, peak.settings
        self.rows: int = peak.settings.encoder_rows

    @cached_property
    def _shape(self) -> EncoderShape | None:
        """The tower's shape; None without images."""
        return self._peak.numbers.tower_shape if self.rows else None

    @cached_property
    def _patch_count(self) -> float:
        """Return how many patches the tower encodes for this slot's rows of images.

        Where it merges patches, a row is `merge`² of them; otherwise all images have one size, and so one ratio of
        patches to rows.
        """
        shape = self._shape
        if shape is None:
            return 0.0
        return self.rows * (shape.patch_count(1) if shape.merge else shape.patches / shape.rows)

    @cached_property
    def _mlp_width(self) -> float:
        """Return the widths of all products of a block's MLP (two, or three with a gate), added up.

        A block has 4 · width² weights of attention, and for its MLP width times this sum.
        """
        shape = self._shape
        assert shape is not None
        layers = shape.full_layers + shape.window_layers
        return shape.block_weights / layers / shape.width - 4 * shape.width

    @cached_property
    def _blocks_bytes(self) -> float:
        """Return the bytes that all blocks keep of the images; 0 where the tower is frozen: it has no graph then."""
        shape, number = self._shape, self._settings.compute_bytes
        if shape is None or self._settings.encoder_trained != "all":
            return 0.0
        patch_numbers = _BLOCK_ROWS * shape.width + self._mlp_width
        return self._patch_count * (shape.full_layers + shape.window_layers) * patch_numbers * number

    @property
    def _output_bytes(self) -> float:
        """Bytes of the encoded rows, which the language model takes."""
        return self.rows * self._peak.row_bytes

    @property
    def bytes_kept(self) -> float:
        """Bytes that are kept while the language model runs."""
        return self._output_bytes + (0.0 if self._settings.encoder_recomputed else self._blocks_bytes)

    @property
    def backward_bytes(self) -> float:
        """Bytes that are kept while encoders run backward."""
        return self._output_bytes + self._blocks_bytes

    @property
    def whole_bytes(self) -> float:
        """Return the bytes of the tower's whole weights, and of summing its gradients, both of all blocks at once.

        Over several slots the weights are there twice: as they arrived, and laid out.
        """
        tower = self._peak.numbers.tower
        return self._peak.gathered_bytes(tower) * (1 + (self._peak.shards > 1)) + self._peak.summing_bytes(tower)

    @property
    def block_work(self) -> float:
        """Return the bytes that a block's backward pass holds: gradients in the MLP, and rotated queries and keys.

        The MLP is taken to have two products, so that each is half of `_mlp_width` wide.
        """
        if self._shape is None:
            return 0.0
        rotary_bytes = 2 * self._shape.width * _ROTARY
        return self._patch_count * (_BACKWARD_ROWS * self._mlp_width / 2 * self._settings.compute_bytes + rotary_bytes)
