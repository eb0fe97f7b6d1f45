"""One thread owns the device: admits, prefills, decodes and delivers."""
