"""What every command is made of: its options, its job from prompts to exit status, its files.

Each command has a room of its own below. None of them knows another's job. Enter by `job` and `options`.
"""
