"""The web page: ES modules and a style sheet, served as they are. It uses the public API alone."""
