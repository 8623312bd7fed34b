"""torch's FSDP2 (`torch.distributed.fsdp.fully_shard`) over the models of Hugging Face's transformers."""
