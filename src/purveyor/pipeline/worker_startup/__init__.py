"""The directory that the pipeline puts on the PYTHONPATH of Spark's Python workers."""
