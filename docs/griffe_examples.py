"""Show our `Example:` sections as code: the docstring parser knows the plural only."""

import re

import griffe


class Examples(griffe.Extension):
    """Rename the section in every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
