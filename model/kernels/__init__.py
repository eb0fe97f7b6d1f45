"""One package per operation: a readable reference, and the forms that the programs run."""
