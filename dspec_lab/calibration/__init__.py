"""Confidence against what happened: records, metrics, sequential temperature scaling, and the calibrated drafter."""
