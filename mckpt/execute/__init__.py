"""Copies to bytes: units, threads, ranks, checksums and the journal of a run."""
