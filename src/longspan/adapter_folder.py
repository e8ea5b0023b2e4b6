"""A folder that holds an adapter of peft alone: what is used instead of it where a model is asked for."""

from pathlib import Path

from longspan.files import read_json

# peft writes this file.
ADAPTER_CONFIGURATION = "adapter_config.json"


def adapter_folder_advice(folder: Path) -> str:
    """Say what to use in place of a folder that holds only an adapter of peft: the run that trained it, where the
    folder is inside a run's, else its base model. "" for any other folder.
    """
    file = folder / ADAPTER_CONFIGURATION
    if not file.is_file() or (folder / "config.json").exists():
        return ""
    try:
        base = read_json(file).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):  # a damaged file, which is an error where the adapter is read
        base = None
    model_text = (
        f"for {base} (base_model_name_or_path of {file.name})" if base else f"whose {file.name} names no model"
    )
    text = f"it holds an adapter of peft, {model_text}, without the model that it belongs to. "
    run = folder.resolve().parent
    if (run / "config.toml").is_file():
        return (
            f"{text}Name the run that trained it ({run}), or give a folder with both in one: longspan export {run} "
            "FOLDER --merge"
        )
    return (
        f'{text}Set model.path = "{base or "BASE"}", and lora.rank for a new adapter over it; to use this one, merge '
        "it into that model in peft (merge_and_unload, then save_pretrained), and give the folder that is saved"
    )
