"""What engines have compiled, on disk: where that is, who may write there, and who does at this moment."""
