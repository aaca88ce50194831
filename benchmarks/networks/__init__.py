"""ResNet-50 and YOLOv4 with seeded random weights: their speed is a trained network's, their answers mean nothing."""
