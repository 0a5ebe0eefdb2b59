"""Parts for retrograd from a separate distribution; each module is one plugin."""
