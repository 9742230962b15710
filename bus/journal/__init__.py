"""The broker's journal: every control message in and out, on disk, to be read and replayed."""
