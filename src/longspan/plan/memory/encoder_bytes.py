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
    """Images of one slot: `rows` of the language model in a step, or in a wave where they are recomputed.

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
    def _patches(self) -> float:
        """Return the patches of this rank's rows of images: `merge`² a row, or those of an image over its rows."""
        shape = self._shape
        if shape is None:
            return 0.0
        return self.rows * (shape.patch_count(1) if shape.merge else shape.patches / shape.rows)

    @cached_property
    def _mlp_width(self) -> float:
        """Return how many numbers a patch has inside a block's MLP, over all of its products (two, or three if gated).

        A block's weights are those of attention, 4 · width², and width times this number.
        """
        shape = self._shape
        assert shape is not None
        layers = shape.full_layers + shape.window_layers
        return shape.block_weights / layers / shape.width - 4 * shape.width

    @cached_property
    def _block_bytes(self) -> float:
        """Return bytes that all blocks keep of the images; 0 unless the whole tower is trained, and so has a graph."""
        shape, number = self._shape, self._settings.compute_bytes
        if shape is None or self._settings.encoder_trained != "all":
            return 0.0
        patch_numbers = _BLOCK_ROWS * shape.width + self._mlp_width
        return self._patches * (shape.full_layers + shape.window_layers) * patch_numbers * number

    @property
    def _output_bytes(self) -> float:
        """Bytes of the encoded rows, which the language model takes."""
        return self.rows * self._peak.row_bytes

    @property
    def bytes_kept(self) -> float:
        """Bytes that are kept while the language model runs."""
        return self._output_bytes + (0.0 if self._settings.encoder_recomputed else self._block_bytes)

    @property
    def backward_bytes(self) -> float:
        """Bytes that are kept while encoders run backward."""
        return self._output_bytes + self._block_bytes

    @property
    def whole_bytes(self) -> float:
        """Bytes of a whole tower, which is gathered at once, and whose gradients are summed at once.

        Over several slots the weights are there twice: as they arrived, and laid out.
        """
        tower = self._peak.numbers.tower
        return self._peak.gathered_bytes(tower) * (1 + (self._peak.shards > 1)) + self._peak.summing_bytes(tower)

    @property
    def block_work(self) -> float:
        """Return the bytes of one block's backward pass; an MLP is half as wide as its two products have numbers."""
        if self._shape is None:
            return 0.0
        turned = 2 * self._shape.width * _ROTARY
        return self._patches * (_BACKWARD_ROWS * self._mlp_width / 2 * self._settings.compute_bytes + turned)
