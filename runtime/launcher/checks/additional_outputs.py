"""Check of --additional-output: the model must have the named outputs."""

from __future__ import annotations

import logging

from runtime.base.errors import ConfigError
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig
from runtime.sampling.additional_outputs import check_served
from runtime.settings.config import RuntimeConfig

logger = logging.getLogger(__name__)


def check_additional_outputs(config: RuntimeConfig, model: CheckpointConfig) -> None:
    """Check the named additional outputs, and log which ones requests may ask for. Raises ConfigError for
    names that the model does not have.
    """
    names = config.additional_outputs
    if not names:
        return
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            "additional_output: a model that runs by the transformers library has none; leave it out"
        )
    if config.task == "embed":
        raise ConfigError("additional_output: an embedding model generates nothing; leave it out")
    check_served(names, model.num_layers)
    logger.info("requests may ask for additional outputs: %s (--additional-output)", ", ".join(names))
