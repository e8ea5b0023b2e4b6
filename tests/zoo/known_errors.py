"""Silent errors of other systems: a check that each does not happen here, and the change of our source that makes it.

Silent: no exception, no warning, and a loss that looks plausible. docs/zoo.md says of each where it happened, how it is
seen, and why it cannot happen here.
"""

from collections.abc import Callable
from typing import NamedTuple

from longspan.comm import World
from longspan.layout import Layout
from tests.model.seams.families import ENTRIES
from tests.zoo import checks

CP, TP, PP = Layout(ranks=2), Layout(ranks=2, tp=2), Layout(ranks=2, pp=2)

RING = checks.attention((29, 12), True)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SINKS = checks.step(
    "GptOssConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=128, rope_parameters=ROPE
)


class KnownError(NamedTuple):
    """A check over two ranks of `home`, and a module, what stands there, and the other system's error in its place."""

    check: Callable[[World], float]
    module: str = ""  # empty where no CPU runs the code
    old: str = ""
    new: str = ""
    home: Layout = CP


GROUPS: dict[str, dict[str, KnownError]] = {
    "Losses and gradients": {
        "loss times the degree": KnownError(
            checks.step(),
            "train.passes",
            "return loss_sum / self.divisor",
            "return loss_sum * self.plan.micro_batches[0].groups[0].degree / self.divisor",
        ),
        "gradients averaged over other ranks than the loss": KnownError(
            checks.norms_at_degrees_1_and_2,
            "train.passes",
            "passes.mean_loss(loss).backward()",
            "(passes.mean_loss(loss) * passes.plan.micro_batches[0].groups[0].degree).backward()",
        ),
        "nan on a rank without targets": KnownError(
            checks.step(lengths=(32, 40), mask=lambda _, p: p < 8),  # in zigzag order rank 1 has none
            "train.loss",
            "return chunked_loss(hidden, targets, cross_entropy, head, self.chunk_rows)",
            "return chunked_loss(hidden, targets, cross_entropy, head, self.chunk_rows) / len(targets.rows)",
        ),
        "loss divided by a rank's own targets": KnownError(
            checks.step(lengths=(24, 40), mask=lambda _, p: p < 9 or p % 5 == 0),
            "train.passes",
            "passes.mean_loss(loss).backward()",
            "(loss / max(int((batch.labels != -100).sum()), 1) / passes.world.home.slots).backward()",
        ),
        "mean of the means of micro-batches": KnownError(
            checks.step(lengths=(30, 4, 3, 17), max_tokens_per_slot=15),
            "train.passes",
            "passes.mean_loss(loss).backward()",
            "(passes.mean_loss(loss) * passes.plan.tokens / batch.shard.tokens / len(batches)).backward()",
        ),
        "metrics summed over ranks that hold the same": KnownError(
            checks.log_probs(1), "train.terms.collected_log_probs", "if world.coordinates.tp == 0:", "if True:", TP
        ),
        "gradient norm counts copies": KnownError(
            checks.clipped_norm,
            "train.gradient_norm",
            "bool((mesh.mesh == self._first_rank).any()) and not any(copy_numbers)",
            "True",
            TP,
        ),
    },
    "Tokens, labels and evaluation": {
        "labels rolled inside a rank's part": KnownError(
            checks.log_probs(2),
            "train.rows.read_rows",
            "targets = labels[ahead]",
            "targets = np.roll(ids, -1)[: len(labels[ahead])]",
        ),
        "a document's last token predicts the next document": KnownError(
            checks.step(lengths=(2, 5, 2, 2, 9)),
            "train.rows.read_rows",
            "targets = labels[ahead]",
            "targets = np.append(labels[ahead], tokens[0])[: stop - start]",
        ),
        "packed samples see each other": KnownError(
            checks.evaluation(packed=True),
            "data.batch_documents",
            "begins = [start] if positions is None else _find_first_columns(row, positions[row], start, stop)",
            "begins = [start]",
        ),
        "evaluation loss times the degree": KnownError(
            checks.evaluation(degrees=(1, 2)),
            "evaluation.live",
            "loss=loss.sum / max(loss.count, 1),",
            "loss=loss.sum * plan.micro_batches[0].groups[0].degree / max(loss.count, 1),",
        ),
        "evaluation averages averages": KnownError(
            checks.evaluation((3, 40, 5), lambda d, p: d != 1 or p > 30),
            "evaluation.live",
            "loss=loss.sum / max(loss.count, 1),",
            "loss=sum(a / b for a, b in zip(totals.documents.tolist(), targets)) / len(targets),",
        ),
        "members evaluate different documents": KnownError(
            checks.evaluation((16, 16, 16)),  # a rank that read other documents would fail no check of sizes
            "train.rows.read_rows",
            "reader.read_run(document, start,",
            "reader.read_run((document + shard_part.member) % len(documents), start,",
        ),
    },
    "Attention": {
        "gradients of ring attention": KnownError(RING, "attention.ring", "add(owner, addends)", "add(owner, [])"),
        "sinks swallowed": KnownError(SINKS, "model.seams.attention_calls", "sinks=s_aux,", "sinks=None,"),
        "windows dropped": KnownError(
            checks.step("MistralConfig", sliding_window=5),
            "model.seams.attention_calls",
            '"window": sliding_window,\n        "chunk": chunk_size(module),',
            '"window": None,\n        "chunk": chunk_size(module),',
        ),
        "the last token of an odd length": KnownError(
            checks.attention((7, 3, 1), True, False),
            "attention.members",
            "        if group.pad_to is None:\n            return segments\n"
            "        stop = np.minimum(segments.stop, np.asarray(group.lengths)[segments.document])",
            "        stop = np.minimum(segments.stop, np.asarray(group.lengths)[segments.document] // 2 * 2)",
        ),
        "rotary positions of packed documents": KnownError(
            checks.step("LlamaConfig", (8, 16, 4, 12)),
            "comm.shard",
            "columns.append((row, position, ids",
            "columns.append((row, position - np.repeat(segments.start, counts), ids",
        ),
    },
    "Layers": {
        "states leak between packed documents": KnownError(
            checks.states_of_packed_documents,
            "ssm.chains",
            "first = np.diff(runs.document, prepend=-1) != 0",
            "first = number == 0",
        ),
        "convolutions reach into the document before": KnownError(
            checks.convolutions_of_packed_documents,
            "ssm.kernels.convolutions",
            "rows = torch.cat([x, arrived, x.new_zeros((1, x.shape[1]))])",
            "rows = torch.cat([x, arrived, x[-1:]])",
        ),
        "compressed windows reach into the document before": KnownError(
            checks.step("DeepseekV4Config", (8, 19, 30, 6), **ENTRIES),
            "layout.entries",
            "np.where(position < 0, none, ",
            "np.where(position < -stride, none, ",
        ),
        "losses of routers without a gradient": KnownError(
            checks.router_losses,
            "model.experts.moe",
            "weights = layer.router.record_routing(",
            "layer.router.record_routing(",
        ),
        "losses of routers shrink with the ranks": KnownError(
            checks.router_losses,
            "model.experts.router",
            "    token_layers = statistics.token_layers",
            "    token_layers = statistics.token_layers * statistics.world.home.slots",
        ),
        "weights of norms without their offset": KnownError(
            checks.norm_formulas,
            "model.seams.norms",
            "for formula in formulas if _computes_formula(norm, formula)",
            "for formula in formulas",
        ),
        "losses of later tokens divided by the degree": KnownError(
            checks.depths(),
            "train.terms.mtp",
            "shares = [mtp.weight / len(targets) * divisor / max(count, 1) for count in targets]",
            "shares = [mtp.weight / len(targets) * divisor / max(count, 1) "
            "/ passes.plan.micro_batches[0].groups[0].degree for count in targets]",
        ),
        "losses of later tokens divided by a rank's targets": KnownError(
            checks.depths((24, 40), lambda _, p: p < 11),
            "train.terms.mtp",
            'world.control.sum_over_stages(local, "targets of multi-token prediction")',
            "local",
        ),
        "offsets of 32 bits": KnownError(checks.kernels_without_64_bits),
    },
    "Weights in 4 bits": {
        "codes pass for numbers": KnownError(
            checks.codes_in_bfloat16,
            "model.frozen.formats.four_bit",
            "codes[start * units : stop * units].view(torch.uint8)",
            "codes[start * units : stop * units].float().to(codes.dtype).view(torch.uint8)",
        ),
        "a shard without its own scales": KnownError(
            checks.scales_of_a_shard,
            "model.frozen.formats.stored_weight",
            "scales = self.scales(part)",
            "scales = self.scales(slice(part.stop and part.stop - part.start))",
        ),
    },
    "Runs": {
        "tied embeddings over pipeline stages": KnownError(
            checks.step(cp=1, tie_word_embeddings=True),
            "model.pipeline.stages",
            "local_slice.copy_(sum_parts([*parts.values()]))",
            "pass",
            PP,
        ),
        "a sum over ranks without its gradient": KnownError(
            checks.step(cp=1),
            "comm.tp_collectives",
            '_all_reduce(gradient, world_key, "sum of gradients over tp")',
            "gradient",
            TP,
        ),
        "epochs times the degree": KnownError(
            checks.documents_of_two_epochs,
            "data.step_order",
            "self.stream.place_after(epochs, ",
            "self.stream.place_after(2 * epochs, ",
        ),
        "a resumed run repeats the first epoch's order": KnownError(
            checks.steps_of_resumed_runs,
            "data.shuffle",
            "keys = [_hash_words(key + epochs * _GOLDEN) for key in self._keys]",
            "keys = [_hash_words(key + 0 * epochs * _GOLDEN) for key in self._keys]",
        ),
        "the newest checkpoint is not there yet": KnownError(
            checks.newest_checkpoint, "checkpoint.files", "return path.name.endswith(PARTIAL)", "return False"
        ),
    },
}
KNOWN_ERRORS = {name: known for group in GROUPS.values() for name, known in group.items()}
