"""Fine-tuning of models of Hugging Face directories: the model, adapters, packed documents, files at the end."""
