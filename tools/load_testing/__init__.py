"""What `tools/load_test.py` is made of: a workload, clients that check what they get, a report."""
