"""The cases of `longspan bench eval`: lengths of documents, sizes of a model, and how it is cut."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longspan.errors import ConfigError
from longspan.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEGREES = (1, 2)
KNOWN_DOCUMENTS, KNOWN_RANKS = 4, 8  # of the published figures, on 8 × H100
VOCABULARY = 10240  # of the published figures: a tokenizer of 10,000 ids, an untied head


@dataclass(frozen=True, kw_only=True)
class Case:
    """Equal documents through a model of a preset with so many layers, on `tp` x `pp` ranks a slot.

    `known` are milliseconds at degrees 1 and 2 that were published for KNOWN_DOCUMENTS on KNOWN_RANKS.
    """

    name: str
    tokens: int
    layers: int
    tp: int = 1
    pp: int = 1
    preset: str = "qwen3-4b"
    known: tuple[float, float] | None = None

    @property
    def ranks(self) -> int:
        """The fewest ranks that it runs on: two slots, for degree 2; more must be a multiple."""
        return max(DEGREES) * self.tp * self.pp

    def runs_on(self, ranks: int) -> bool:
        """Whether so many ranks are slots of this case, which degree 2 divides."""
        return ranks % self.ranks == 0

    def home(self, ranks: int) -> Layout:
        """The home of its model on so many ranks."""
        return Layout(ranks, tp=self.tp, pp=self.pp)

    def configuration(self, vocabulary: int) -> "PreTrainedConfig":
        """The model's configuration, with an untied head. Raises ModelError for an unknown preset."""
        from longspan.bench.layers import with_layers
        from longspan.model.presets import preset_config

        configuration = with_layers(preset_config(self.preset, vocab_size=vocabulary), self.layers)
        configuration.vocab_size, configuration.tie_word_embeddings = vocabulary, False
        return configuration


CASES = (
    Case(name="1k-tp2", tokens=1024, layers=4, tp=2, known=(8.9, 12.4)),
    Case(name="8k-tp2", tokens=8192, layers=8, tp=2, known=(26.3, 21.3)),
    Case(name="8k-pp2", tokens=8192, layers=8, pp=2),
    Case(name="16k-pp2", tokens=16384, layers=8, pp=2),
    Case(name="8k-tp2-pp2", tokens=8192, layers=8, tp=2, pp=2, known=(39.5, 32.2)),
    Case(name="8k-pp4", tokens=8192, layers=8, pp=4, known=(53.1, 32.3)),
    Case(name="16k-tp2-pp2", tokens=16384, layers=8, tp=2, pp=2, known=(82.5, 46.5)),
    Case(name="16k-pp4", tokens=16384, layers=8, pp=4, known=(117.7, 62.8)),
)
TINY_CASES = (
    Case(name="tiny-tp2", tokens=48, layers=2, tp=2, preset="qwen3-tiny"),
    Case(name="tiny-pp2", tokens=48, layers=2, pp=2, preset="qwen3-tiny"),
)


def cases_of(names: str, *, gpu: bool, preset: str = "", layers: int = 0, tokens: int = 0) -> tuple[Case, ...]:
    """The cases with these names (commas between; "": all of a GPU, or the tiny ones), changed as is asked for.

    What was published belongs to unchanged cases alone. Raises ConfigError for a name that is not there.
    """
    known = {case.name: case for case in (*CASES, *TINY_CASES)}
    default = CASES if gpu else TINY_CASES
    chosen = [word.strip() for word in names.split(",") if word.strip()] or [case.name for case in default]
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"--cases has {', '.join(unknown)}; cases are {', '.join(known)}")
    settings = {"preset": preset, "layers": layers, "tokens": tokens}
    changes: dict[str, Any] = {name: value for name, value in settings.items() if value}
    if changes:
        changes["known"] = None
    return tuple(replace(known[name], **changes) for name in chosen)
