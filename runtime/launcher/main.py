"""The launcher: settings → processes → ready → serve → exit code. `python launch.py --model DIR`, or
`carousel --model DIR` where it is installed.

Exit codes: 0 stopped on request; 64 bad settings; 69 port or run directory taken; 70 a process failed for
good; 72 no such model; 75 stopped before all requests had finished.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from runtime.base.console import configure_logging, hold_standard_streams, write_error
from runtime.base.cpu_isa import choose_cpu_isa
from runtime.base.environment import find_users_modules, has_vllm_api_key
from runtime.base.errors import EXIT_OK, StartError
from runtime.checkpoint.hub import is_hub_id, localize
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.overrides import read_overridden
from runtime.checkpoint.own_spec import own_row
from runtime.checkpoint.weight_files import check_weight_files
from runtime.launcher.checks.additional_outputs import check_additional_outputs
from runtime.launcher.checks.chat_formats import with_chat_formats
from runtime.launcher.checks.descriptors import check_descriptors
from runtime.launcher.checks.device import check_device
from runtime.launcher.checks.tokenizer import check_tokenizer
from runtime.launcher.command_line import parse_command_line
from runtime.launcher.launch_names import check_address
from runtime.launcher.nodes.agent import Agent
from runtime.launcher.nodes.node_settings import with_nodes
from runtime.launcher.nodes.ray_nodes import RayNodes
from runtime.launcher.nodes.starters import with_starter
from runtime.launcher.resolved_config import check_settings, resolve_config
from runtime.launcher.supervisor import Supervisor
from runtime.launcher.weights.checks import with_weight_updates
from runtime.ring.process import set_title
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.settings.layer_split import split_layers

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a launch from its settings to its exit code."""
    hold_standard_streams()
    end_by_signal()
    try:
        config, notes = parse_command_line(argv)
        asked = config = with_starter(config)
        set_title("launcher")
        configure_logging("launcher", config.log_level, config.log_format)
        for note in notes:
            logger.info("%s", note)
        check_descriptors()
        choose_cpu_isa(config.cpu_isa)
        if config.model_spec:
            find_users_modules()
            own_row(config.model_spec)  # reports a wrong one before a model is downloaded
        if is_hub_id(config.model) or is_hub_id(config.tokenizer):
            _check_before_download(config)
        config = localize(config)
        model_path = Path(config.model) if config.model else DEMO_MODEL
        config, model = read_overridden(config, model_path)
        config = resolve_config(
            config,
            context_length=model.max_position_embeddings,
            dtype=model.dtype,
            has_spec=isinstance(model, ModelConfig),
            has_head=model.has_head,
            model_path=model_path.resolve(),
        )
        if not (config.has_api_keys or config.no_http) and has_vllm_api_key():
            logger.warning(
                "VLLM_API_KEY is not read: whoever can reach the server may ask; set CAROUSEL_API_KEY"
            )
        if isinstance(model, ModelConfig):
            model.check_ranks(config.tp_size)
            split_layers(model.layer_weights(), config.pp_size, config.pp_layers)
        config = with_weight_updates(config)
        check_additional_outputs(config, model)
        check_device(config.device)
        if config.load_format != "dummy":
            check_weight_files(model_path)
        config = with_nodes(with_chat_formats(config, check_tokenizer(config)))
        if config.node_rank:
            return Agent(config).run()
        with RayNodes(asked, config) if asked.executor == "ray" else nullcontext():
            return Supervisor(config).run()
    except KeyboardInterrupt:
        return EXIT_OK
    except StartError as error:
        write_error(str(error))
        return error.exit_code


def end_by_signal() -> None:
    """Let SIGTERM end this process as Ctrl-C does, until the supervisor handles it. The first process of a
    container ignores signals without a handler, and the download of a model may take long.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _check_before_download(config: RuntimeConfig) -> None:
    """Check what does not depend on the model, before an hour of downloading. Raises StartError."""
    check_settings(config)
    check_device(config.device)
    check_address(config)


if __name__ == "__main__":
    sys.exit(main())
