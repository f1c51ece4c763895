"""What is asked: presets, settings and flags become one resolved job."""
