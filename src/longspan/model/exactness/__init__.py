"""May this model run? Rules for what it declares, passes on the meta device, small copies, and trials of the model.

`check_model.py` calls them and lists them in order; `prepare` calls it, and steps call `row_trial.py` before the first.
Small copies: `small_copies.py` makes and tries them, with `small_values.py`, `small_layers.py`, `small_image_values.py`
and `trial_documents.py`.
"""
