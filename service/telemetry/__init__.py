"""What the server tells of itself: metrics, traces, log lines, load reports."""
