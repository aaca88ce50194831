"""rocserve"""
