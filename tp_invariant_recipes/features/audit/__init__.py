"""tpi audit: is a layout wrong, or only rounded otherwise?"""
