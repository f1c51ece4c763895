"""The command line, and the parts of every command: its options, its job from prompts to exit status, its files.

Large commands have their own subpackages, which do not use each other's jobs. Start with `app`, `job` and `options`.
"""
