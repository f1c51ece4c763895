"""The command line, and what every command is made of: its options, its job from prompts to exit status, its files.

Large commands have a room of their own below. None of them knows another's job. Enter by `app`, `job` and `options`.
"""
