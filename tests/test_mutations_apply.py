"""Every mutation of the tables names a line of the source as it is: the tables themselves run in `make test-all`."""

import pytest

from tests.attention.test_mutations import MUTATIONS as OF_ATTENTION
from tests.bridge.test_bridge import MUTATIONS as OF_BRIDGES
from tests.corpus.images.test_mutations import MUTATIONS as OF_IMAGE_ROWS
from tests.evaluation.test_mutations import MUTATIONS as OF_EVALUATIONS
from tests.hf.test_files import MUTATIONS as OF_CHECKPOINTS
from tests.hf.test_trainer import MUTATIONS as OF_TRAINERS
from tests.model.experts.test_moe_families import MUTATIONS as OF_EXPERTS
from tests.model.frozen.test_exact import MUTATIONS as OF_FROZEN_STEPS
from tests.model.frozen.test_loaded_models import MUTATIONS as OF_LOADED_CODES
from tests.model.frozen.test_nf4 import MUTATIONS as OF_CODES
from tests.model.frozen.test_reading import MUTATIONS as OF_FROZEN_WEIGHTS
from tests.model.lora.test_exact import MUTATIONS as OF_ADAPTERS
from tests.model.mtp.test_exact import MUTATIONS as OF_DEPTHS, OF_WHOLE_DEPTHS
from tests.model.mtp.test_images import MUTATIONS as OF_DEPTHS_BESIDE_IMAGES
from tests.model.seams.test_entries import CHANGES as OF_ENTRIES
from tests.model.seams.test_indexers import CHANGES as OF_INDEXERS, IN_TILES as OF_SCORES_IN_TILES
from tests.model.seams.test_latents import CHANGES as OF_LATENTS
from tests.model.seams.test_pools import IN_BLOCKS as OF_BLOCKS, IN_POOLS as OF_POOLS
from tests.model.test_host_weights import MUTATIONS as OF_HOST_WEIGHTS
from tests.model.vision.test_adapters import MUTATIONS as OF_ADAPTED_ENCODERS
from tests.model.vision.test_exact import (
    MUTATIONS as OF_IMAGES,
    PREFIX as OF_PREFIXES,
    SPANS as OF_SPANS,
    VIDEOS as OF_VIDEOS,
)
from tests.mutation import mutate, restore
from tests.run.runs.test_families_run import MUTANTS as OF_FAMILIES
from tests.ssm.test_parity import MUTANTS as OF_STATES
from tests.train.multimodal.test_mutations import MUTATIONS as OF_MODALITIES
from tests.train.optim.test_hidden_updates import MUTATIONS as OF_HIDDEN_UPDATES
from tests.train.own_loss.test_families import MUTATIONS as OF_SHARED_PREFIXES
from tests.train.own_loss.test_mutations import MUTATIONS as OF_LOSSES
from tests.train.steps.test_matrix import MUTATIONS as OF_STEPS
from tests.train.steps.test_shared_stages import MUTANTS as OF_SHARED_STAGES
from tests.zoo.known_errors import KNOWN_ERRORS

CHANGES = [
    *OF_ATTENTION,
    *OF_BRIDGES,
    *OF_DEPTHS.values(),
    *OF_CHECKPOINTS.values(),
    *OF_FAMILIES.values(),
    *OF_INDEXERS.values(),
    *OF_SCORES_IN_TILES.values(),
    *OF_LATENTS.values(),
    *OF_BLOCKS.values(),
    *OF_ENTRIES.values(),
    *OF_POOLS.values(),
    *OF_LOADED_CODES.values(),
    *OF_TRAINERS.values(),
    *OF_WHOLE_DEPTHS.values(),
    *OF_FROZEN_STEPS.values(),
    *OF_HOST_WEIGHTS.values(),
    *OF_CODES.values(),
    *OF_HIDDEN_UPDATES.values(),
    *OF_SHARED_PREFIXES.values(),
    *OF_FROZEN_WEIGHTS.values(),
    *OF_DEPTHS_BESIDE_IMAGES.values(),
    *OF_ADAPTED_ENCODERS.values(),
    *(change for change, _ in OF_SHARED_STAGES.values()),
    *(change for change, _ in OF_STEPS),
    *OF_IMAGES.values(),
    *OF_SPANS.values(),
    *OF_PREFIXES.values(),
    *OF_VIDEOS.values(),
    *(known[1:4] for known in KNOWN_ERRORS.values() if known.module),
    *(mutation[:3] for mutation in OF_MODALITIES.values()),
    *(mutation[2:] for mutation in OF_EXPERTS.values()),
    *((f"ssm.{module}", old, new) for module, old, new in OF_STATES.values()),
    *(
        change
        for table in (OF_ADAPTERS, OF_LOSSES, OF_IMAGE_ROWS, OF_EVALUATIONS)
        for change, _ in table.values()
        if change
    ),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change[0]}: {change[1]}"[:60])
def test_a_mutation_changes_one_function(change: tuple[str, str, str]) -> None:
    restore(mutate(*change))
