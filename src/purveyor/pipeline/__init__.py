"""The pipeline on Spark: transform, dispatch, archive, prefill, replay. Pure rules, and queries that apply them."""
