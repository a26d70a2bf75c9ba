"""What `accelerate launch` imports from DeepSpeed's launcher; the launcher here is `zerofold launch`."""
