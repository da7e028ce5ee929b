"""Updates of a vLLM engine on another host: ``python -m bench.vllm_update``."""
