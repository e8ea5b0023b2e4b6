"""May this model run? Rules for what it declares, passes on the meta device, small copies, and trials of the model.

`check_model.py` calls them and lists them in order; `prepare` calls it, and steps call `row_trial.py` before the first.
`small_copies.py` makes small copies of models, with `small_values.py` and `trial_documents.py`.
"""
