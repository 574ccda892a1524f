"""The list of pages for `llms.txt`."""

import pytest

from tools import llms_txt


def test_a_page_is_a_line_with_title_address_and_sentence(tmp_path):
  (tmp_path / "guides").mkdir()
  (tmp_path / "index.md").write_text("# Home\n\nThis page is for\nusers. It ends.\n")
  page = "# Saving\n<!-- a note -->\n\nA [file](a.md) of `torch.save` opens. More.\n"
  (tmp_path / "guides" / "saving.md").write_text(page)
  nav = [{"Start": ["index.md"]}, {"Guides": [{"Files": "guides/saving.md"}]}]
  text = llms_txt.render("torchax", "Torch.", nav, tmp_path)
  assert text.splitlines() == [
    "# torchax",
    "",
    "> Torch.",
    "",
    "## Start",
    "",
    "- [Home](./): For users.",
    "",
    "## Guides",
    "",
    "- [Files](guides/saving/): A file of `torch.save` opens.",
  ]


@pytest.mark.parametrize("page", ["no heading\n", "# Title\n", "# Title\n\n| a |\n"])
def test_a_page_without_a_sentence_is_refused(page):
  with pytest.raises(ValueError, match="needs a heading and a sentence"):
    llms_txt.first_sentence(page)
