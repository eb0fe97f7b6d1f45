"""Everything that is traced: the model, its caches, sampling and the fused decode program."""
