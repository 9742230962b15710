"""The broker's journal: records every control message on disk, and reads and replays them."""
