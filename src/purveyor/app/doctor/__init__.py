"""The checks of `purveyor doctor`: the machine, the NATS server and the pipeline."""
