"""Where models come from: locators such as `pypi:NAME==VERSION/file.gguf` resolve to local files."""
