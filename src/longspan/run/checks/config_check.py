"""Whether the values of a configuration fit together and fit the ranks. Runs before any process group exists.

What needs the data or the model (a document that is too long, a list of types as long as the layers) is checked by
the run once it has them, still before the first collective of a step.
"""

from longspan.config.sections import RunConfig, check_measures
from longspan.layout import Layout
from longspan.run.checks.check_data import check_data, check_eval_sets, check_packs
from longspan.run.checks.check_model import (
    check_encoder_keys,
    check_lora,
    check_model_keys,
    check_mtp_section,
    check_precision,
    check_preset,
)
from longspan.run.checks.check_plans import check_plans
from longspan.run.checks.check_training import (
    check_mode,
    check_numbers,
    check_optimizer,
    check_parallel,
    check_pipeline,
)
from longspan.run.loggers.run_loggers import check_loggers
from longspan.train.plans import home_of


def check_config(config: RunConfig, ranks: int, *, training: bool = True) -> Layout:
    """Return the home of the run on `ranks` ranks, if every value is possible there.

    Without `training`, for a run that is only evaluated, its learning rate, packs, loggers and plans of training steps
    are not checked.
    Raises ConfigError (LayoutError for ranks that tp x pp does not divide) with the key, the numbers and what fits.
    """
    check_model_keys(config, training=training)
    check_data(config)
    check_eval_sets(config)
    check_numbers(config, training=training)
    home = home_of(config.parallel, ranks)
    check_precision(config)
    check_lora(config)
    check_mtp_section(config)
    check_parallel(config, home)
    check_encoder_keys(config, home)
    check_measures(config.train)
    check_pipeline(config)
    check_mode(config)
    check_optimizer(config)
    if training:
        check_packs(config)
    check_plans(config, home, training=training)
    check_preset(config)
    if training:
        check_loggers(config.run.loggers)
    return home
