"""What processes of the data plane share: heaps of tensors, links of messages, doorbells."""
