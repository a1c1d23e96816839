"""Give parts of a page names, for those who hear it: the search dialog of the theme has none.

Input: a page as the theme made it. Output: the same page, with the name.
"""

DIALOG = 'role="dialog"'


def on_post_page(output: str, **kwargs: object) -> str:
    """Name the dialog that search opens."""
    return output.replace(DIALOG, f'{DIALOG} aria-label="Search"')


def on_post_template(output_content: str, template_name: str, **kwargs: object) -> str:
    """Do the same on the page that is shown where there is none."""
    return on_post_page(output_content) if template_name == "404.html" else output_content
