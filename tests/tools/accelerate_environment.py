"""What `accelerate launch` sets for its processes from a configuration file alone, by its own code."""

import os
from pathlib import Path


def environment_of(config: Path) -> dict[str, str]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(config), "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        made = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        made = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in made.items() if os.environ.get(key) != value}
