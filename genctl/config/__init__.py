"""Configuration: presets, settings files, the environment and flags become one resolved job."""
