"""The other system's error, put into our source: what must turn each check of the zoo red.

A change is a module of longspan, what stands in it once, and what takes its place. Those of kernels, which no CPU
runs, change the source that the check reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tests.mutation import Change, mutated
from tests.zoo import layers

MUTATIONS: dict[str, Change] = {
    # losses and gradients
    "loss times the degree": (
        "train.passes",
        "return loss_sum / self.divisor",
        "return loss_sum * self.plan.micro_batches[0].groups[0].degree / self.divisor",
    ),
    "gradients averaged over other ranks than the loss": (
        "train.passes",
        "passes.mean(loss).backward()",
        "(passes.mean(loss) * passes.plan.micro_batches[0].groups[0].degree).backward()",
    ),
    "nan on a rank without targets": (
        "train.loss",
        "return chunked_loss(hidden, targets, cross_entropy, head, self.chunk_rows)",
        "return chunked_loss(hidden, targets, cross_entropy, head, self.chunk_rows) / len(targets.rows)",
    ),
    "loss divided by a rank's own targets": (
        "train.passes",
        "passes.mean(loss).backward()",
        "(loss / max(int((batch.labels != -100).sum()), 1) / passes.world.home.slots).backward()",
    ),
    "mean of the means of micro-batches": (
        "train.passes",
        "passes.mean(loss).backward()",
        "(passes.mean(loss) * passes.plan.tokens / batch.shard.tokens / len(batches)).backward()",
    ),
    "metrics summed over ranks that hold the same": (
        "train.terms.token_loss",
        "if world.coordinates.tp == 0:",
        "if True:",
    ),
    "gradient norm counts copies": (
        "train.step_end",
        "return bool((mesh.mesh == self._first_rank).any()) and not any(copies)",
        "return True",
    ),
    # tokens, labels and evaluation
    "labels rolled inside a rank's part": (
        "train.read_rows",
        "row, tokens[ahead], labels[ahead], {",
        "row, tokens[ahead], np.roll(tokens[ahead], -1)[: len(labels[ahead])], {",
    ),
    "a document's last token predicts the next document": (
        "train.read_rows",
        "row, tokens[ahead], labels[ahead], {",
        "row, tokens[ahead], np.append(labels[ahead], tokens[0])[: stop - start], {",
    ),
    "packed samples see each other": (
        "data.batch_documents",
        "begins = [start] if positions is None else _find_first_columns(row, positions[row], start, stop)",
        "begins = [start]",
    ),
    "evaluation loss times the degree": (
        "evaluation.evaluate",
        "loss=loss / max(plan.targets, 1),",
        "loss=loss * plan.micro_batches[0].groups[0].degree / max(plan.targets, 1),",
    ),
    "evaluation averages averages": (
        "evaluation.evaluate",
        "loss=loss / max(plan.targets, 1),",
        "loss=sum(a / b for a, b in zip(totals.documents.tolist(), targets)) / len(targets),",
    ),
    "members evaluate different documents": (
        "train.read_rows",
        "reader.read_run(document, start,",
        "reader.read_run((document + shard_part.member) % len(documents), start,",
    ),
    # attention
    "gradients of ring attention": ("attention.ring", "self._sums.add(owner, addends)", "self._sums.add(owner, [])"),
    "sinks swallowed": ("model.seams.attention_calls", '"sinks": s_aux, "softcap"', '"sinks": None, "softcap"'),
    "windows dropped": ("model.seams.attention_calls", '"window": sliding_window, "chunk": chunk_size(module), "sinks"',
                        '"window": None, "chunk": chunk_size(module), "sinks"'),
    "the last token of an odd length": (
        "attention.call",
        "        if group.pad_to is None:\n            return segments\n"
        "        stop = np.minimum(segments.stop, np.asarray(group.lengths)[segments.document])",
        "        stop = np.minimum(segments.stop, np.asarray(group.lengths)[segments.document] // 2 * 2)",
    ),
    "rotary positions of packed documents": (
        "comm.shard",
        "return np.where(real, base + starts[document] + positions, -1), positions",
        "return np.where(real, base + starts[document] + positions, -1), "
        "positions - np.repeat(segments.start, sizes)",
    ),
    # layers
    "states leak between packed documents": (
        "ssm.chains",
        "first = np.diff(document, prepend=-1) != 0",
        "first = np.arange(len(document)) == 0",
    ),
    "convolutions reach into the document before": (
        "ssm.kernels.convolutions",
        "rows = torch.cat([x, arrived, x.new_zeros((1, x.shape[1]))])",
        "rows = torch.cat([x, arrived, x[-1:]])",
    ),
    "losses of routers without a gradient": (
        "model.experts.moe",
        "weights = layer.sums.record_routing(",
        "layer.sums.record_routing(",
    ),
    "losses of routers shrink with the ranks": (
        "model.experts.router",
        "coefficients, token_layers = statistics.coefficients, statistics.token_layers",
        "coefficients, token_layers = statistics.coefficients, "
        "statistics.token_layers * statistics.world.home.slots",
    ),
    "weights of norms without their offset": (
        "model.seams.norms",
        "for f in (_PLAIN, NormFormula(offset=1.0)) if _computes_formula(norm, f)",
        "for f in (_PLAIN, NormFormula(offset=1.0))",
    ),
    "losses of later tokens divided by the degree": (
        "train.terms.mtp",
        "shares = [mtp.weight / len(targets) * divisor / max(count, 1) for count in targets]",
        "shares = [mtp.weight / len(targets) * divisor / max(count, 1) "
        "/ passes.plan.micro_batches[0].groups[0].degree for count in targets]",
    ),
    "losses of later tokens divided by a rank's targets": (
        "train.terms.mtp",
        'world.control.sum_over_stages(local, "targets of multi-token prediction")',
        "local",
    ),
    # runs
    "tied embeddings over pipeline stages": (
        "model.pipeline.stages",
        "local_slice.copy_(sum_parts([*parts.values()]))",
        "pass",
    ),
    "a sum over ranks without its gradient": (
        "comm.tp_collectives",
        '_all_reduce(gradient, world_key, "sum of gradients over tp")',
        "gradient",
    ),
    "epochs times the degree": (
        "data.step_order",
        "self.stream.place_after(epochs))",
        "self.stream.place_after(2 * epochs))",
    ),
    "a resumed run repeats the first epoch's order": (
        "data.stream",
        "keys = [_hash_words(key + epochs * _GOLDEN) for key in self._keys]",
        "keys = [_hash_words(key + 0 * epochs * _GOLDEN) for key in self._keys]",
    ),
    "the newest checkpoint is not there yet": (
        "checkpoint.files",
        "else path.name.endswith(PARTIAL)",
        "else False",
    ),
}  # fmt: skip


@contextmanager
def with_error(name: str) -> Iterator[None]:
    """Put the other system's error of this name into our source while the context is open."""
    if name == "offsets of 32 bits":
        narrow = {kernel: source.replace("tl.int64", "tl.int32") for kernel, source in layers.kernel_sources().items()}
        with patch.object(layers, "kernel_sources", lambda: narrow):
            yield
        return
    with mutated(MUTATIONS[name]):
        yield
